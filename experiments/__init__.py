"""One module for each question a researcher asks: flags in, a run folder out."""
