"""Serves samples of a verified release over HTTP: requests, their queue, and the pages that explain them."""
