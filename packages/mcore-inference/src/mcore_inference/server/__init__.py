"""OpenAI's interface for completions over HTTP: `pip install 'mcore-inference[server]'`."""

from mcore_inference.server.app import create_app
from mcore_inference.server.run import address, bind, serve

__all__ = ["address", "bind", "create_app", "serve"]
