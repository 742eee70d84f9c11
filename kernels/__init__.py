"""Triton kernels only: no layout names, engines or policies in here."""
