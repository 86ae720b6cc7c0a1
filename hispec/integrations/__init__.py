"""HiSpec inside of other systems. Each module imports the system that it is named after."""
