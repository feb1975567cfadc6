"""behaviour"""
