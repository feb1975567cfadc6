"""distillation"""
