"""The documentation as a site: pages of the repository, built by Sphinx into build/site."""
