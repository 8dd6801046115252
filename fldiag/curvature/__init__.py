"""Products with curvature matrices, and eigenvalues of what is known by its products alone."""
