"""Routers, one family a file: which expert did a noised sample come from?"""
