"""Measures on trained models and on results; nothing here trains."""
