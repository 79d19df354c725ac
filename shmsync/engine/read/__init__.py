"""Read sections of one subscriber: enter, wait, move to a new version, copy it out.

The common case is native (native/bind/reader.hpp); reading.py has what it calls for the rest.
May be imported by engine and integrations.
"""
