"""A discrete-event simulator of engines: their own policies and controllers over a latency model and an
acceptance model."""
