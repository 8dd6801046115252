"""Ways in and out of other programs: recorders of loops that are not fldiag's, folders of files."""
