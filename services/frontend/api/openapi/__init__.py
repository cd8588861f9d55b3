"""The API's own description: /openapi.json, made of what the readers take, and a page for people at /docs."""
