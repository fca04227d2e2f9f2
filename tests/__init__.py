"""Tests; a package so that tests can import tests.support and its neighbours."""
