"""How the documentation is built: ``make docs`` writes ``site/``, strictly and without network."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE)]

from fldiag.version import version as _version  # noqa: E402


def figures(block, block_vars, gallery_conf):
    """The matplotlib figure that a gallery script names ``figure``: fldiag draws without pyplot, which keeps none open."""
    from sphinx_gallery.scrapers import figure_rst

    figure = block_vars["example_globals"].pop("figure", None)
    if figure is None:
        return ""
    path = next(block_vars["image_path_iterator"])
    figure.savefig(path, dpi=100)
    return figure_rst([path], gallery_conf["src_dir"])


project, author, copyright = "fldiag", "the fldiag authors", "the fldiag authors, MIT licence"
release = version = _version()
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "myst_nb",
    "equations",
    "reference",
]
exclude_patterns = [
    "_ext",
    "README.md",
    "gallery_made/*.ipynb",
    "gallery_made/*.py",
    "gallery_made/*.zip",
    "gallery_made/*.md5",
    "gallery_made/*.json",
    "gallery",
    "**/.ipynb_checkpoints",
]
nitpicky = False
smartquotes_action = "qe"  # options stay as they are typed: --keep
myst_enable_extensions = ["deflist", "dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
# Notebooks are run at every build, so what they show is what the code of today says.
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"Target": "Target"}
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "gallery_made",
    "filename_pattern": r"/plot_",
    "image_scrapers": (figures,),
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "abort_on_example_error": True,
    "min_reported_time": 1e9,
    "write_computation_times": False,
}
html_theme = "pydata_sphinx_theme"
html_title = "fldiag"
html_static_path = ["_static"]
html_css_files = ["fldiag.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
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
suppress_warnings = ["mystnb.unknown_mime_type", "config.cache"]
