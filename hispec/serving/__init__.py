"""HiSpec for many callers at once: requests of asyncio tasks, and an HTTP server over them."""
