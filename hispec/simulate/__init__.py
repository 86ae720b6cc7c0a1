"""A discrete-event simulator of engines: the same policies and controllers, over a cost model and an
acceptance model."""
