"""Sandboxes on other machines: a server around a local back end, and the back end that speaks to such servers."""
