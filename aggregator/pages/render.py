"""Fills the page templates of this package."""

from functools import partial

from ddm.pages import render as pages

render = partial(pages.render, "aggregator")
