"""All side effects of the library: files, plots, progress. Used by experiments alone."""
