"""OpenAI's API in words of HiSpec: for files of its Batch API, and for servers."""
