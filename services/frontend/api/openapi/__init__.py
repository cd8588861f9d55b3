"""The API's own description: /openapi.json, written from the classes of the request bodies, and a page for people at /docs."""
