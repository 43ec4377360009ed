"""What a step of fop costs, in time and memory, against its peers: `fop-bench steps`."""
