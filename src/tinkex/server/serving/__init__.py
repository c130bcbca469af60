"""Endpoints of OpenAI's and Anthropic's APIs, for programs that use a trained model."""
