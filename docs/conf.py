"""The documentation site. ``scripts/docs`` builds it; warnings are errors there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "extensions")]

# What runs while the site is built: first_steps.md and the --help texts, in processes that inherit these.
os.environ |= {"JAX_PLATFORMS": "cpu", "NO_COLOR": "1", "COLUMNS": "90"}

import pycollective  # noqa: E402

project = "pycollective"
author = "The pycollective developers"
copyright = f"2026, {author}"
version = release = pycollective.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    # Ours.
    "docstrings",
    "references",
    "settings",
]

# Pages -------------------------------------------------------------------------------------------------------

exclude_patterns = ["extensions", "pictures", "static"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = False  # a cell that raises is a warning then, with its traceback; warnings are errors
nb_execution_timeout = 300  # seconds for a page
nb_execution_in_temp = True
nb_execution_show_tb = True
nb_merge_streams = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# The reference -----------------------------------------------------------------------------------------------

napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
nitpicky = True

# With a network (scripts/docs --links) the names of other projects are links into their documentation.
if os.environ.get("PYCOLLECTIVE_DOCS_LINKS") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
        "mpi4py": ("https://mpi4py.readthedocs.io/en/stable", None),
    }

# The look ----------------------------------------------------------------------------------------------------

html_theme = "sphinx_book_theme"
html_title = "pycollective"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "navbar_persistent": [],  # the search is in the sidebar
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
