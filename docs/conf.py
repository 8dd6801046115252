"""How the documentation is built: ``make docs`` writes ``site/``, strictly and without network."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE)]

from fldiag import __version__  # noqa: E402

project, author, copyright = "fldiag", "the fldiag authors", "the fldiag authors, MIT licence"
release = version = __version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_parser",
    "mathml",
    "pictures",
    "reference",
]
exclude_patterns = ["_ext"]
nitpicky = False
smartquotes_action = "qe"  # options stay as they are typed: --keep
myst_enable_extensions = ["deflist", "dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"Target": "Target"}
html_theme = "pydata_sphinx_theme"
html_title = "fldiag"
html_static_path = ["_static"]
html_css_files = ["fldiag.css"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"**": ["globaltoc.html"]}
html_theme_options = {
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
    "navigation_with_keys": False,
    "collapse_navigation": True,
    "show_toc_level": 2,
}
suppress_warnings = ["config.cache"]
