"""senses"""
