"""The dashboard: metrics and samples of runs, a read API under `/local/`, live events, and the page that shows them."""
