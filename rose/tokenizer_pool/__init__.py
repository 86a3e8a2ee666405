"""Tokenizing in processes of its own: chat templates and long texts, with limits that hold."""
