"""Translating with a trained model: beam search on one device, and over all ranks."""
