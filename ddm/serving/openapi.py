"""Describes the service as OpenAPI 3.1, from the model of its request."""

from typing import Any

from ddm.serving.requests import NPZ, PNG, ServiceLimits, request_schema
from ddm.system.version import installed_version

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ERROR = {
    "application/json": {
        "schema": {"type": "object", "properties": {"error": {"type": "string"}}},
    }
}
_ERRORS = {
    "408": "The request did not arrive in time.",
    "413": "The request has too many bytes.",
    "415": "The request is not application/json.",
    "422": "The request is not as described, above the limits of this server, or does not fit the release.",
    "500": "The samples could not be drawn; the server's log says why.",
    "503": "Too many requests are waiting, or the server is ending; the header Retry-After says when to try again.",
}


def describe_service(limits: ServiceLimits) -> dict[str, Any]:
    """Return the OpenAPI document of this server."""
    answers: dict[str, Any] = {
        "200": {
            "description": "The images: a grid as PNG; or npz with images, expert, synthetic, release and class.",
            "content": {PNG: _BINARY, NPZ: _BINARY},
        }
    }
    for status, description in _ERRORS.items():
        answers[status] = {"description": description, "content": _ERROR}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Samples of a release",
            "version": installed_version(),
            "description": "Draws images from a verified release. All images are synthetic.",
        },
        "paths": {
            "/sample": {
                "post": {
                    "summary": "Draw images.",
                    "requestBody": {
                        "required": True,
                        "content": {
                            "application/json": {
                                "schema": {"$ref": "#/components/schemas/SampleRequest"}
                            }
                        },
                    },
                    "responses": answers,
                }
            },
            "/info": _reading("What the release is, and the limits of this server."),
            "/health": _reading(
                "Whether the server draws; requests that are open; calls of the sampler and images so far."
            ),
            "/openapi.json": _reading("This document."),
        },
        "components": {"schemas": {"SampleRequest": request_schema(limits)}},
    }


def _reading(summary: str) -> dict[str, Any]:
    answer = {
        "description": summary,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
    return {"get": {"summary": summary, "responses": {"200": answer}}}
