"""`hispec report --html`: a page of its own, without a network, of what a file of HiSpec's holds."""
