"""Check deploy/kuberay.yaml against KubeRay's schema, and what it lets Serve and infercore do.

    python integrations/ray/tests/check_manifest.py ray.io_rayservices.yaml

The file is helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml of ray-project/kuberay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from ray.serve.schema import ServeDeploySchema

from infercore_ray.application import app_builder

MANIFEST = Path(__file__).parents[3] / "deploy" / "kuberay.yaml"


def strict(schema: Any) -> Any:
    """Return a Kubernetes schema that refuses fields that it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if (
        isinstance(schema.get("properties"), dict)
        and schema.get("type") == "object"
        and not is_open
    ):
        found.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return found


def faults(manifest: Any, definition: Any) -> list[str]:
    """Return what KubeRay's ``definition`` of a RayService has against ``manifest``."""
    group = definition["spec"]["group"]
    for version in definition["spec"]["versions"]:
        if manifest["apiVersion"] == f"{group}/{version['name']}":
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own
            errors = Draft202012Validator(schema).iter_errors(manifest)
            return [f"{error.json_path}: {error.message[:200]}" for error in errors]
    return [f"no version {manifest['apiVersion']}"]


def models_of(manifest: Any) -> list[str]:
    """Return the applications of the Serve part, which Serve and infercore have accepted."""
    built = ServeDeploySchema(**yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    for app in built.applications:
        args = dict(app.args)
        args.pop("api_key_file")  # it is on the cluster
        app_builder(args)
    return [app.name for app in built.applications]


def main() -> int:
    """Print the faults; return how many there are."""
    manifest = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    definition = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = faults(manifest, definition)
    for fault in found:
        sys.stdout.write(f"{fault}\n")
    sys.stdout.write(f"{len(found)} faults; Serve's part makes {models_of(manifest)}\n")
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
