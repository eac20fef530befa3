"""Writers of data sets: from a publisher's files, from a folder, sample by sample."""
