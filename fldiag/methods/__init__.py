"""Published methods, one a file; ``fldiag.catalogue("methods")`` lists them."""
