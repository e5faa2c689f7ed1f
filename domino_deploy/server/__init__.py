"""The OpenAI-compatible server: HTTP on one side, the engine on the other.

`app.py` puts the routes together, `run.py` runs them with uvicorn.  Needs the extra `serve`; only the command imports it.
"""
