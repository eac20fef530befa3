"""How a data set is written: from a publisher's files, from a folder, sample by sample."""
