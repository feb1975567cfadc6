"""contextuality"""
