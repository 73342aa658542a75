"""Tests of the site that ``make docs`` builds, and of the programs on its pages."""
