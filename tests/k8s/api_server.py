"""An API server of the tests: lists, watches, patches and Events over real HTTP, with the rules of Kubernetes that the
operator relies on, and objects that Helm looks up while it renders. test_cluster.py has a real one.

    async with ApiServer().serve() as server:
        server.add("speculativepools", pool)
        ...
        server.compact()          # all versions before are gone: a watch from one of them gets 410
        server.end_watches()      # connections break
        server.rights = rules     # of a Role; everything else is refused

A watch sends what happened since its version, and then what happens; each list and object has a version that grows. A
Deployment gets pods at once, which are ready unless `pods_start` is False, and loses them in Kubernetes' order.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from tests.k8s import definition, discovery
from tests.k8s.schemas import Schemas

NAMESPACE = "models"
RESOURCES = {
    "speculativepools": ("/apis/laps-sd.dev/v1alpha1", "SpeculativePool"),
    "deployments": ("/apis/apps/v1", "Deployment"),
    "statefulsets": ("/apis/apps/v1", "StatefulSet"),
    "pods": ("/api/v1", "Pod"),
    "events": ("/api/v1", "Event"),
    "configmaps": ("/api/v1", "ConfigMap"),
    "secrets": ("/api/v1", "Secret"),
    "services": ("/api/v1", "Service"),
    "leases": ("/apis/coordination.k8s.io/v1", "Lease"),
}
"""Path of the group's version, and kind."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

Object = dict[str, Any]


class Refusal(Exception):
    """An answer with a Status."""

    def __init__(self, code: int, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.body = {
            "kind": "Status",
            "code": code,
            "reason": str(code),
            "message": message,
            "details": details,
        }


class ApiServer:
    """One namespace. A test reads and changes it directly; the operator does so by HTTP."""

    def __init__(self) -> None:
        self.url = ""
        self.defined = True
        """Whether the definition of pools is installed."""
        self.rights: Sequence[Mapping[str, Any]] | None = None
        """Rules of a Role; None: everything is allowed."""
        self.used: set[tuple[str, str]] = set()
        """Every resource with a verb that was used and allowed."""
        self.denied: set[tuple[str, str]] = set()
        """Every resource with a verb that was used and is no right."""
        self.refusals: dict[tuple[str, str], Refusal] = {}
        """Answer to each call with this verb for this resource."""
        self.calls: list[tuple[str, str]] = []
        self.pods_start = True
        self._objects: dict[str, dict[str, Object]] = {resource: {} for resource in RESOURCES}
        self._version = 10
        self._compacted = 0
        self._history: list[tuple[int, str, str, Object]] = []
        """Version, resource, type and object of each change."""
        self._changed = asyncio.Condition()
        self._broken = 0
        """Number of times that the connections of all watches broke."""
        self._names = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._schemas: Schemas | None = None

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[ApiServer]:
        """Listen on a free port."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, shutdown_timeout=0.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.end_watches()
            await runner.cleanup()

    @contextlib.contextmanager
    def serve_beside(self) -> Iterator[ApiServer]:
        """Listen on a free port, in a thread, for tests that do not run a loop; they change it by `run`."""
        self._loop = loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        serving = self.serve()

        def run(work: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        run(_enter(serving))
        try:
            yield self
        finally:
            run(_leave(serving))
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def run(self, change: Callable[[], Any]) -> Any:
        """Call a function in the loop of `serve_beside`."""

        async def called() -> Any:
            return change()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(called(), self._loop).result()

    # What a test does.

    def get(self, resource: str, name: str) -> Object:
        return copy.deepcopy(self._objects[resource][name])

    def all(self, resource: str) -> list[Object]:
        return copy.deepcopy(list(self._objects[resource].values()))

    def add(self, resource: str, found: Object) -> Object:
        """Create an object as a user does."""
        return self._create(resource, copy.deepcopy(found))

    def add_rendered(self, rendered: Sequence[Object]) -> None:
        """Create what Helm has rendered, of the kinds that are served."""
        resources = {kind: resource for resource, (_, kind) in RESOURCES.items()}
        for made in rendered:
            if made["kind"] in resources:
                self.add(resources[made["kind"]], made)

    def change(self, resource: str, name: str, patch: Object) -> Object:
        """Send a merge patch as a user does, of the status too."""
        return self._write(resource, name, lambda found: merged(found, patch))

    def delete(self, resource: str, name: str) -> None:
        found = self._objects[resource].pop(name)
        self._record(resource, "DELETED", found)
        self._collect(found)
        self._settle()

    def compact(self) -> None:
        """Forget all changes until now."""
        self._history.clear()
        self._compacted = self._version

    def end_watches(self) -> None:
        """Break the connections of all watches."""
        self._broken += 1
        self._notify()

    def bookmark(self, resource: str) -> None:
        """Send each watch of the resource the present version."""
        self._version += 1
        self._history.append((self._version, resource, "BOOKMARK", _bookmark(self._version)))
        self._notify()

    def send(self, resource: str, message: Object) -> None:
        """Send each watch of the resource any message."""
        self._version += 1
        self._history.append((self._version, resource, "RAW", message))
        self._notify()

    # HTTP.

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            if described := discovery.answer(request.path, NAMESPACE, RESOURCES):
                return web.json_response(described)
            resource, name, sub = self._place(request.path)
            verb = _verb(request, name)
            full = f"{resource}/{sub}" if sub else resource
            self.calls.append((full, verb))
            if resource == "speculativepools" and not self.defined:
                raise Refusal(404, "the server could not find the requested resource")
            self._authorize(full, verb, name)
            if refusal := self.refusals.get((full, verb)):
                raise refusal
            if verb == "watch":
                return await self._serve_watch(request, resource)
            body = await request.json() if request.can_read_body else None
            return web.json_response(self._answer(request, verb, resource, name, sub, body))
        except Refusal as refusal:
            return web.json_response(refusal.body, status=refusal.code)

    def _answer(
        self, request: web.Request, verb: str, resource: str, name: str, sub: str, body: Any
    ) -> Object:
        query = request.query
        if verb == "list":
            items = [one for one in self._objects[resource].values() if selected(one, query)]
            return {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": items}
        if verb == "create":
            self._strict(resource, query, body)
            return self._create(resource, body, dry_run="dryRun" in query)
        if name not in self._objects[resource]:
            raise Refusal(404, f'{resource} "{name}" not found')
        if verb == "get":
            return self._objects[resource][name]
        if verb == "update":
            self._same_version(resource, name, body)
            return self._write(resource, name, lambda _: body)
        if request.content_type == "application/json-patch+json":
            return self._write(
                resource, name, lambda found: patched(found, body), dry_run="dryRun" in query, query=query
            )
        if sub == "status":
            body = {"status": body["status"]}
        elif resource == "speculativepools":
            body.pop("status", None)
        return self._write(resource, name, lambda found: merged(found, body), query=query)

    async def _serve_watch(self, request: web.Request, resource: str) -> web.StreamResponse:
        answer = web.StreamResponse()
        answer.content_type = "application/json"
        version = int(request.query["resourceVersion"])
        await answer.prepare(request)
        if version < self._compacted:
            expired = {"code": 410, "reason": "Expired", "message": "too old resource version"}
            await answer.write(_line("ERROR", expired))
            return answer
        broken = self._broken
        while broken == self._broken:
            for number, kind, message in self._since(version, resource, request.query):
                await answer.write(_line(kind, message))
                version = number
            async with self._changed:
                if broken == self._broken and not any(self._since(version, resource, request.query)):
                    await self._changed.wait()
        if request.transport is not None:
            request.transport.abort()
        return answer

    def _since(
        self, version: int, resource: str, query: Mapping[str, str]
    ) -> Iterator[tuple[int, str, Object]]:
        for number, of, kind, found in list(self._history):
            if (
                number > version
                and of == resource
                and (kind in ("BOOKMARK", "RAW") or selected(found, query))
            ):
                yield number, kind, found

    def _place(self, path: str) -> tuple[str, str, str]:
        """Return resource, name and subresource of a path."""
        for resource, (group, _) in RESOURCES.items():
            prefix = f"{group}/namespaces/{NAMESPACE}/{resource}"
            if path == prefix or path.startswith(f"{prefix}/"):
                name, _, sub = path[len(prefix) + 1 :].partition("/")
                return resource, name, sub
        raise Refusal(404, f"there is no {path}")

    def _authorize(self, resource: str, verb: str, name: str) -> None:
        if self.rights is not None and not any(
            resource in rule["resources"]
            and verb in rule["verbs"]
            and ("resourceNames" not in rule or name in rule["resourceNames"])
            for rule in self.rights
        ):
            self.denied.add((resource, verb))
            raise Refusal(403, f'User "operator" cannot {verb} resource "{resource}"')
        self.used.add((resource, verb))

    def _strict(self, resource: str, query: Mapping[str, str], found: Object) -> None:
        if resource != "deployments" or query.get("fieldValidation") != "Strict":
            return
        if self._schemas is None:
            self._schemas = Schemas("1.30")
        if problems := self._schemas.problems(found):
            raise Refusal(400, f"strict decoding error: {problems[0]}")

    def _same_version(self, resource: str, name: str, body: Object) -> None:
        if (
            body["metadata"].get("resourceVersion")
            != self._objects[resource][name]["metadata"]["resourceVersion"]
        ):
            raise Refusal(409, "the object has been modified")

    # Objects.

    def _create(self, resource: str, found: Object, *, dry_run: bool = False) -> Object:
        metadata = found["metadata"]
        if "generateName" in metadata:
            metadata["name"] = f"{metadata['generateName']}{next(self._names)}"
        if metadata["name"] in self._objects[resource]:
            raise Refusal(409, f"{resource} {metadata['name']} already exists")
        if resource == "speculativepools" and (problems := definition.problems(found)):
            raise Refusal(422, problems[0], causes=[{}])
        complete(resource, found)
        metadata |= {"namespace": NAMESPACE, "uid": f"u-{next(self._names)}", "generation": 1}
        if not dry_run:
            self._put(resource, found, "ADDED")
        return found

    def _write(
        self, resource: str, name: str, change: Any, *, dry_run: bool = False, query: Mapping[str, str] = {}
    ) -> Object:
        before = self._objects[resource][name]
        found = change(copy.deepcopy(before))
        plain = {key: value for key, value in found.items() if key != "status"}
        self._strict(resource, query, {**plain, "metadata": {"name": name}})
        complete(resource, found)
        if found.get("spec") != before.get("spec"):
            found["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
        if dry_run or found == before:
            return found
        if manager := query.get("fieldManager", "someone"):
            found["metadata"].setdefault("managedFields", []).append(
                {"manager": manager, "time": str(self._version)}
            )
        self._put(resource, found, "MODIFIED")
        return found

    def _put(self, resource: str, found: Object, kind: str) -> None:
        self._objects[resource][found["metadata"]["name"]] = found
        self._record(resource, kind, found)
        self._settle()

    def _record(self, resource: str, kind: str, found: Object) -> None:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, resource, kind, copy.deepcopy(found)))
        self._notify()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().create_task(notify())

    # Kubernetes' controllers.

    def _settle(self) -> None:
        """Create and delete pods until each Deployment has its number."""
        for deployment in list(self._objects["deployments"].values()):
            own = [
                pod for pod in self._objects["pods"].values() if _owner(pod) == deployment["metadata"]["uid"]
            ]
            wanted = deployment["spec"].get("replicas", 1)
            if len(own) < wanted:
                return self._put("pods", self._pod_of(deployment), "ADDED")
            if len(own) > wanted:
                leaving = min(own, key=leaves_first)
                return self.delete("pods", leaving["metadata"]["name"])
            status = {
                "observedGeneration": deployment["metadata"]["generation"],
                "replicas": len(own),
                "updatedReplicas": len(own),
            }
            if deployment.get("status") != status:
                deployment["status"] = status
                self._record("deployments", "MODIFIED", deployment)
        return None

    def _pod_of(self, deployment: Object) -> Object:
        name, template = (
            f"{deployment['metadata']['name']}-{next(self._names)}",
            deployment["spec"]["template"],
        )
        pod: Object = copy.deepcopy({"metadata": template.get("metadata", {}), "spec": template["spec"]})
        owner = {"kind": "Deployment", "uid": deployment["metadata"]["uid"]}
        pod["metadata"] |= {"name": name, "uid": f"u-{name}", "ownerReferences": [owner], "generation": 1}
        if self.pods_start:
            pod["spec"]["nodeName"] = "n"
            pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        else:
            pod["status"] = {"phase": "Pending"}
        return pod

    def _collect(self, owner: Object) -> None:
        for resource, found in self._objects.items():
            for one in list(found.values()):
                if _owner(one) == owner["metadata"]["uid"]:
                    del found[one["metadata"]["name"]]
                    self._record(resource, "DELETED", one)
                    self._collect(one)


def leaves_first(pod: Object) -> tuple[bool, bool, bool, int]:
    """Return the order in which Kubernetes removes pods."""
    status, annotations = pod["status"], pod["metadata"].get("annotations") or {}
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", ()))
    cost = int(annotations.get(DELETION_COST, 0))
    return bool(pod["spec"].get("nodeName")), status["phase"] == "Running", ready, cost


def complete(resource: str, found: Object) -> None:
    """Rewrite a Deployment as Kubernetes does: with defaults, and quantities in their shortest form."""
    if resource != "deployments":
        return
    found["spec"].setdefault("replicas", 1)
    pod = found["spec"]["template"]["spec"]
    pod.setdefault("restartPolicy", "Always")
    for container in pod["containers"]:
        container.setdefault("imagePullPolicy", "IfNotPresent")
        for side in (container.get("resources") or {}).values():
            side.update(
                {name: "1" if str(value) in ("1000m", "1") else str(value) for name, value in side.items()}
            )


def selected(found: Object, query: Mapping[str, str]) -> bool:
    """Return whether the object has each label, or label with its value, of `labelSelector`."""
    labels = found["metadata"].get("labels") or {}
    parts = (part.partition("=") for part in query.get("labelSelector", "").split(","))
    return all(label in labels and value in ("", labels[label]) for label, _, value in parts if label)


def merged(found: Any, patch: Any) -> Any:
    """Return the result of a merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(found) if isinstance(found, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def patched(found: Object, operations: list[Object]) -> Object:
    """Return the result of a JSON patch (RFC 6902) with test, add, replace and remove."""
    for operation in operations:
        *parents, last = (
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        )
        place: Any = found
        for part in parents:
            if part not in place:
                raise Refusal(422, "the server rejected our request due to an error in our request")
            place = place[part]
        if operation["op"] in ("test", "replace", "remove") and last not in place:
            raise Refusal(422, "the server rejected our request due to an error in our request")
        if operation["op"] == "test":
            if place[last] != operation["value"]:
                raise Refusal(422, "the server rejected our request due to an error in our request")
        elif operation["op"] == "remove":
            del place[last]
        else:
            place[last] = copy.deepcopy(operation["value"])
    return found


async def _enter(serving: contextlib.AbstractAsyncContextManager[Any]) -> None:
    await serving.__aenter__()


async def _leave(serving: contextlib.AbstractAsyncContextManager[Any]) -> None:
    await serving.__aexit__(None, None, None)


def _verb(request: web.Request, name: str) -> str:
    if request.method == "GET":
        return "get" if name else "watch" if request.query.get("watch") == "true" else "list"
    return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[request.method]


def _owner(found: Object) -> str:
    owners = found["metadata"].get("ownerReferences") or ()
    return next((one["uid"] for one in owners), "")


def _bookmark(version: int) -> Object:
    return {"metadata": {"resourceVersion": str(version)}}


def _line(kind: str, found: Object) -> bytes:
    message = found if kind == "RAW" else {"type": kind, "object": found}
    return json.dumps(message).encode() + b"\n"
