"""What HiSpec counts and times: a table of names, kinds, units and meanings; histograms; Prometheus."""
