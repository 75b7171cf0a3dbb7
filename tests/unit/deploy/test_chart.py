"""The Helm chart: its values, and the objects rendered from the defaults in deploy/kubernetes."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml
from fastapi.routing import APIRoute

from service.http import admin
from service.settings import ENV_PREFIX, Settings
from tests.unit.deploy.support import REPOSITORY, load_yaml, manifest

CHART = REPOSITORY / "deploy/helm/care-search"
RENDERED = REPOSITORY / "deploy/kubernetes/care-search.yaml"
VALUES = load_yaml("deploy/helm/care-search/values.yaml")
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
POD: dict[str, Any] = manifest("Deployment")["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


@pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm, which no Debian package has")
def test_the_rendered_objects_match_the_chart() -> None:
    made = subprocess.run(["helm", "template", "care", CHART], capture_output=True, text=True, check=True).stdout
    assert RENDERED.read_text(encoding="utf-8").partition("\n")[2] == made, "run `make chart`"


@pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm, which no Debian package has")
def test_with_keys_the_pods_read_a_secret_and_the_monitor_has_a_key() -> None:
    command = ["helm", "template", "care", CHART, "--set", "keys=care-keys,monitor.enabled=true"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "monitor.secret" in refused.stderr
    made = subprocess.run([*command, "--set", "monitor.secret=scrape"], capture_output=True, text=True, check=True)
    objects = {each["kind"]: each for each in yaml.safe_load_all(made.stdout)}
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (file,) = [each["value"] for each in pod["containers"][0]["env"] if each["name"] == "CARE_KEYS_FILE"]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "keys"]
    assert (file, mount["readOnly"]) == (f"{mount['mountPath']}/keys.json", True)
    assert {"name": "keys", "secret": {"secretName": "care-keys"}} in pod["volumes"]
    (endpoint,) = objects["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "scrape", "key": "key"}}


@pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm, which no Debian package has")
def test_the_re_index_publishes_for_the_encoder_and_the_database_of_the_service() -> None:
    given = "secret=care,settings.CARE_ENCODER=/encoder,settings.CARE_VECTORS=qdrant+http://qdrant:6333/care"
    command = ["helm", "template", "care", CHART, "--set", given]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = {each["kind"]: each["spec"] for each in yaml.safe_load_all(made)}
    (service,) = objects["Deployment"]["template"]["spec"]["containers"]
    (reindex,) = objects["CronJob"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert reindex["envFrom"] == service["envFrom"]
    assert [each["name"] for each in reindex["env"]] == ["CARE_ENCODER", "CARE_VECTORS"]
    assert all(each in service["env"] for each in reindex["env"])


def test_the_schema_has_every_value_and_refuses_others() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    assert SCHEMA["properties"].keys() - VALUES.keys() == {"global"}
    for wrong in (
        {"replica": 3},
        {"replicas": 0},
        {"settings": VALUES["settings"] | {"care_port": "1"}},
        {"settings": VALUES["settings"] | {"CARE_THREADS": 2}},
        {"settings": VALUES["settings"] | {"CARE_PORT": "9000"}},
        {"settings": VALUES["settings"] | {"CARE_TLS_CERT": "/tls.crt"}},
        {"settings": VALUES["settings"] | {"CARE_KEYS_FILE": "/keys.json"}},
        {"keys": "no name"},
        {"autoscaling": {"metric": "memory"}},
        {"collection": {"accessMode": "ReadOnlyMany"}},
        {"reindex": {"schedule": "weekly"}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(VALUES | wrong, SCHEMA)


def test_the_environment_has_only_settings() -> None:
    given = {each["name"]: each["value"] for each in CONTAINER["env"]}
    values = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in given.items()}
    settings = Settings.model_validate(values)
    service = manifest("Service")["metadata"]["name"]
    assert settings.host_names is not None
    assert {service, f"{service}.default.svc.cluster.local"} <= settings.host_names
    # A Service named care would set CARE_PORT and others, which the service refuses.
    assert POD["spec"]["enableServiceLinks"] is False


def test_a_pod_leaves_the_service_before_it_closes_its_port() -> None:
    settings = VALUES["settings"]
    drain, shutdown = float(settings["CARE_DRAIN_SECONDS"]), float(settings["CARE_SHUTDOWN_SECONDS"])
    probe = CONTAINER["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < drain
    assert POD["spec"]["terminationGracePeriodSeconds"] > drain + shutdown
    assert manifest("Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_probes_use_existing_paths_and_the_open_port() -> None:
    paths = {route.path for route in admin.health.routes if isinstance(route, APIRoute)}
    probes = {kind: CONTAINER[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/livez",
        "liveness": "/livez",
        "readiness": "/readyz",
    }
    assert {probe["path"] for probe in probes.values()} <= paths
    (port,) = CONTAINER["ports"]
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert port["containerPort"] == Settings.model_fields["port"].default
    (exposed,) = manifest("Service")["spec"]["ports"]
    assert exposed["targetPort"] == port["name"]
    probe_seconds = Settings.model_fields["probe_timeout_ms"].default / 1000
    assert CONTAINER["readinessProbe"]["timeoutSeconds"] > probe_seconds


def test_every_selector_finds_the_pods_of_the_service_and_no_others() -> None:
    labels = POD["metadata"]["labels"].items()
    job = manifest("CronJob")["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"].items()
    for selector in (
        manifest("Service")["spec"]["selector"],
        manifest("Deployment")["spec"]["selector"]["matchLabels"],
        manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels
        assert not selector.items() <= job
    closed = manifest("NetworkPolicy")["spec"]
    assert closed["podSelector"]["matchLabels"].items() <= labels & job
    assert closed["policyTypes"] == ["Ingress", "Egress"]


@pytest.mark.parametrize("kind", ["Deployment", "CronJob"])
def test_a_pod_has_minimal_privileges(kind: str) -> None:
    spec = manifest(kind)["spec"]
    pod = (spec["template"] if kind == "Deployment" else spec["jobTemplate"]["spec"]["template"])["spec"]
    assert pod["automountServiceAccountToken"] is False
    context = pod["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, 10001, 10001)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    claims = {volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]}
    assert claims["collection"] == manifest("PersistentVolumeClaim")["metadata"]["name"]


def test_the_collection_outlives_the_release() -> None:
    assert manifest("PersistentVolumeClaim")["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert len(list(yaml.safe_load_all(RENDERED.read_text(encoding="utf-8")))) == 6
