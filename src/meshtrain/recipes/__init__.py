"""The programs, `python -m meshtrain.recipes.NAME`, written on the public API. Not a place for what a library user needs."""
