"""effective_attention"""
