"""All side effects of the library: files, plots, progress; for experiments alone."""
