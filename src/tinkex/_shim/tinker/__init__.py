"""Found as `tinker` when tinkex stands in for it; hands over to tinkex at once."""

from tinkex.compat import install_as_tinker

install_as_tinker()
