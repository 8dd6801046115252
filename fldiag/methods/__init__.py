"""Published methods, one a file; ``fldiag.methods()`` lists them."""

from fldiag import registry

registry.listing(__name__, registry.method)
