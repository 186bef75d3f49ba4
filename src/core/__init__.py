"""Plain data that every floor shares: errors, requests, plans, events, configuration.

Standard library and msgspec only, so that anything here can be logged, sent to a peer rank, or
built in a test without a device.
"""
