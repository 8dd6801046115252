"""Matrix-free linear algebra: Hessian-vector products and eigensolvers with measured residuals."""
