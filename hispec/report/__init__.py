"""`hispec report`: what a trace says, in words, as JSON and as a picture."""
