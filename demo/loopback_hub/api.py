"""The Hub's HTTP endpoints for model repositories, as `huggingface_hub` calls them."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from pathlib import Path
from urllib.parse import parse_qs, unquote

import yaml
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from .store import TOKEN, USER, Commit, Entry, HubError, Repo, Store, front_matter, git_oid, lfs_pointer

LFS_ABOVE = 10 << 20


class Api:
    """Handlers; `blob_url` is another origin than the endpoint, as on the Hub, so no token travels there."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = self.blob_url = ""

    def routes(self) -> list[Route]:
        """Paths and handlers."""
        repo = "/api/models/{namespace}/{name}"
        return [
            Route("/api/whoami-v2", self.whoami),
            Route("/api/repos/create", self.create, methods=["POST"]),
            Route("/api/validate-yaml", self.validate_yaml, methods=["POST"]),
            Route("/api/models", self.list_models),
            Route(repo, self.info),
            Route(repo + "/revision/{revision:path}", self.info),
            Route(repo + "/preupload/{revision:path}", self.preupload, methods=["POST"]),
            Route(repo + "/commit/{revision:path}", self.commit, methods=["POST"]),
            Route(repo + "/paths-info/{revision:path}", self.paths_info, methods=["POST"]),
            Route(repo + "/tree/{revision}", self.tree),
            Route(repo + "/refs", self.refs),
            Route(repo + "/tag/{revision:path}", self.tag, methods=["POST"]),
            Route("/{namespace}/{name}.git/info/lfs/objects/batch", self.lfs_batch, methods=["POST"]),
            Route("/{namespace}/{name}.git/info/lfs/objects/verify", self.lfs_verify, methods=["POST"]),
            Route("/_blobs/{oid}", self.upload, methods=["PUT"]),
            Route("/_blobs/{oid}", self.download, methods=["GET", "HEAD"]),
            Route(
                "/{namespace}/{name}/resolve/{revision}/{path:path}", self.resolve, methods=["GET", "HEAD"]
            ),
            *self._dataset_routes(),
            Route("/{path:path}", self.nothing, methods=["GET", "HEAD", "POST", "PUT", "DELETE"]),
        ]

    def _dataset_routes(self) -> list[Route]:
        """A repository can also be read as a data set."""
        repo = "/api/datasets/{namespace}/{name}"
        return [
            Route(repo, self.info),
            Route(repo + "/revision/{revision:path}", self.info),
            Route(repo + "/paths-info/{revision:path}", self.paths_info, methods=["POST"]),
            Route(repo + "/tree/{revision}", self.folder),
            Route(repo + "/tree/{revision}/{folder:path}", self.folder),
            Route(
                "/datasets/{namespace}/{name}/resolve/{revision}/{path:path}",
                self.resolve,
                methods=["GET", "HEAD"],
            ),
        ]

    # who, and what they may

    def user(self, request: Request) -> str | None:
        """The user of the request's token; None without one."""
        header = request.headers.get("authorization", "")
        if not header:
            return None
        if header != f"Bearer {TOKEN}":
            raise HubError(401, None, "Invalid credentials in Authorization header")
        return USER

    def repo(self, request: Request, *, write: bool = False, content: bool = False) -> Repo:
        """The repository of the path, where this user may do what is asked."""
        user = self.user(request)
        name = f"{request.path_params['namespace']}/{request.path_params['name']}"
        repo = self.store.repos.get(name)
        if repo is None or (repo.private and user is None):
            raise HubError(401 if user is None else 404, "RepoNotFound", "Repository not found")
        if content and repo.gated and user != repo.owner:
            raise HubError(
                401 if user is None else 403, "GatedRepo", f"Access to model {name} is restricted."
            )
        if write and user != repo.owner:
            status = 401 if user is None else 403
            raise HubError(status, None, f"Forbidden: you don't have the rights to write to {name}")
        return repo

    def at(self, request: Request, repo: Repo) -> Commit:
        """The commit that the path names."""
        return repo.commit(unquote(request.path_params.get("revision", "main")))

    async def whoami(self, request: Request) -> Response:
        user = self.user(request)
        if user is None:
            raise HubError(401, None, "Invalid username or password.")
        token = {"displayName": "loopback", "role": "write"}
        return JSONResponse(
            {"type": "user", "name": user, "fullname": user, "orgs": [], "auth": {"accessToken": token}}
        )

    # writing

    async def create(self, request: Request) -> Response:
        user, body = self.user(request), await request.json()
        if user is None:
            raise HubError(401, None, "Invalid username or password.")
        name = f"{body.get('organization') or user}/{body['name']}"
        if not name.startswith(f"{user}/"):
            raise HubError(
                403, None, f"You don't have the rights to create a model under {name.split('/')[0]}"
            )
        answer = {"url": f"{self.url}/{name}", "name": name}
        with self.store.lock:
            if name in self.store.repos:
                return JSONResponse({"error": "You already created this model repo", **answer}, 409)
            repo = Repo(name, private=body.get("visibility") == "private" or bool(body.get("private")))
            attributes = self.store.put(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
            repo.add({".gitattributes": attributes}, "initial commit")
            self.store.repos[name] = repo
        return JSONResponse(answer)

    async def validate_yaml(self, request: Request) -> Response:
        text = front_matter((await request.json())["content"])
        try:
            yaml.safe_load(text or "")
        except yaml.YAMLError as error:
            return JSONResponse({"errors": [{"message": str(error)}], "warnings": []}, 400)
        return JSONResponse({"errors": [], "warnings": []})

    async def preupload(self, request: Request) -> Response:
        repo = self.repo(request, write=request.query_params.get("create_pr") != "1")
        tree, answers = self.at(request, repo).tree, []
        for file in (await request.json())["files"]:
            large = file["size"] > LFS_ABOVE or file["path"].endswith((".safetensors", ".png"))
            answer = {
                "path": file["path"],
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": False,
            }
            if file["path"] in tree:
                answer["oid"] = tree[file["path"]].lfs or tree[file["path"]].oid
            answers.append(answer)
        return JSONResponse({"files": answers})

    async def lfs_batch(self, request: Request) -> Response:
        repo, objects = self.repo(request), []  # blobs of a proposal, too: the commit decides
        for wanted in (await request.json())["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
            if not (self.store.lfs / wanted["oid"]).exists():
                verify = f"{self.url}/{repo.id}.git/info/lfs/objects/verify"
                answer["actions"] = {
                    "upload": {"href": f"{self.blob_url}/_blobs/{wanted['oid']}"},
                    "verify": {"href": verify, "header": {}},
                }
            objects.append(answer)
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def upload(self, request: Request) -> Response:
        oid, digest = request.path_params["oid"], hashlib.sha256()
        part = self.store.lfs / f".{uuid.uuid4().hex}"
        with part.open("wb") as file:
            async for chunk in request.stream():
                file.write(chunk)
                digest.update(chunk)
        if digest.hexdigest() != oid:
            part.unlink()
            return PlainTextResponse("BadDigest", 400)
        part.replace(self.store.lfs / oid)
        return Response()

    async def lfs_verify(self, request: Request) -> Response:
        body = await request.json()
        path = self.store.lfs / Path(body["oid"]).name
        good = path.exists() and path.stat().st_size == body["size"]
        return JSONResponse({"message": "ok" if good else "not found"}, 200 if good else 404)

    async def commit(self, request: Request) -> Response:
        proposed = request.query_params.get("create_pr") == "1"
        repo = self.repo(request, write=not proposed)
        if self.user(request) is None:
            raise HubError(401, None, "Invalid username or password.")
        branch = unquote(request.path_params["revision"])
        lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
        with self.store.lock:
            base = repo.commit(branch)
            tree, title = dict(base.tree), ""
            for line in lines:
                key, value = line["key"], line["value"]
                if key == "header":
                    title = value.get("summary", "")
                    if value.get("parentCommit") and not base.sha.startswith(value["parentCommit"]):
                        raise HubError(
                            412, None, "A commit has happened since. Please refresh and try again."
                        )
                elif key == "file":
                    tree[value["path"]] = self.store.put(base64.b64decode(value["content"]))
                elif key == "lfsFile":
                    blob = self.store.lfs / value["oid"]
                    if not blob.exists():
                        raise HubError(400, None, f"LFS object {value['oid']} not found")
                    size = blob.stat().st_size
                    tree[value["path"]] = Entry(size, git_oid(lfs_pointer(value["oid"], size)), value["oid"])
                elif key == "deletedFile" and tree.pop(value["path"], None) is None:
                    raise HubError(400, None, f"{value['path']} does not exist")
            answer: dict[str, object] = {"success": True}
            if proposed:
                number = 1 + sum(name.startswith("refs/pr/") for name in repo.branches)
                repo.branches[f"refs/pr/{number}"] = base.sha
                branch = f"refs/pr/{number}"
                answer["pullRequestUrl"] = f"{self.url}/{repo.id}/discussions/{number}"
            new = repo.add(tree, title, branch)
        answer |= {"commitOid": new.sha, "commitUrl": f"{self.url}/{repo.id}/commit/{new.sha}"}
        return JSONResponse(answer)

    async def tag(self, request: Request) -> Response:
        repo, body = self.repo(request, write=True), await request.json()
        if body["tag"] in repo.tags:
            raise HubError(409, None, "Tag reference exists already")
        repo.tags[body["tag"]] = self.at(request, repo).sha
        return PlainTextResponse("OK")

    # reading

    async def info(self, request: Request) -> Response:
        repo = self.repo(request)
        commit = self.at(request, repo)
        described = self.store.description(repo, commit)
        if request.query_params.get("blobs"):
            described["siblings"] = [
                {"rfilename": path, "size": entry.size, "blobId": entry.oid, **_lfs(entry, "sha256")}
                for path, entry in sorted(commit.tree.items())
            ]
        return JSONResponse(described)

    async def list_models(self, request: Request) -> Response:
        user, found = self.user(request), []
        wanted = {tag.lower() for value in request.query_params.getlist("filter") for tag in value.split(",")}
        for repo in self.store.repos.values():
            described = self.store.description(repo, repo.head)
            tags = {str(tag).lower() for tag in described["tags"]}  # type: ignore[attr-defined]
            if (not repo.private or user == repo.owner) and wanted <= tags:
                found.append(described)
        return JSONResponse(found)

    async def tree(self, request: Request) -> Response:
        commit = self.at(request, self.repo(request))
        return JSONResponse([_item(path, entry) for path, entry in sorted(commit.tree.items())])

    async def folder(self, request: Request) -> Response:
        """Files and folders directly in a folder."""
        commit = self.at(request, self.repo(request))
        folder = unquote(request.path_params.get("folder", "")).strip("/")
        within = f"{folder}/" if folder else ""
        rows: dict[str, dict[str, object]] = {}
        for path, entry in sorted(commit.tree.items()):
            if path.startswith(within):
                name, deeper, _ = path.removeprefix(within).partition("/")
                row = {"type": "directory", "path": within + name, "oid": "0" * 40, "size": 0}
                rows[name] = row if deeper else _item(path, entry)
        return JSONResponse([*rows.values()])

    async def paths_info(self, request: Request) -> Response:
        commit = self.at(request, self.repo(request))
        body = (await request.body()).decode()
        is_json = "json" in request.headers.get("content-type", "")
        paths = json.loads(body)["paths"] if is_json else parse_qs(body).get("paths", [])
        return JSONResponse([_item(path, commit.tree[path]) for path in paths if path in commit.tree])

    async def refs(self, request: Request) -> Response:
        repo = self.repo(request)

        def rows(kind: str, names: dict[str, str]) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": sha} for n, sha in names.items()]

        return JSONResponse(
            {"branches": rows("heads", repo.branches), "converts": [], "tags": rows("tags", repo.tags)}
        )

    async def resolve(self, request: Request) -> Response:
        commit = self.at(request, self.repo(request, content=True))
        entry = commit.tree.get(unquote(request.path_params["path"]))
        headers = {"X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
        if entry is None:
            raise HubError(404, "EntryNotFound", "Entry not found", headers)
        if entry.lfs:
            headers |= {"X-Linked-Size": str(entry.size), "X-Linked-ETag": f'"{entry.lfs}"'}
            return Response(
                status_code=302, headers=headers | {"Location": f"{self.blob_url}/_blobs/{entry.lfs}"}
            )
        return FileResponse(self.store.blob(entry), headers=headers | {"ETag": f'"{entry.oid}"'})

    async def download(self, request: Request) -> Response:
        oid = Path(request.path_params["oid"]).name
        return FileResponse(self.store.lfs / oid, headers={"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    async def nothing(self, request: Request) -> Response:
        return JSONResponse({"error": f"no route {request.method} {request.url.path}"}, 404)


def _item(path: str, entry: Entry) -> dict[str, object]:
    return {"type": "file", "path": path, "oid": entry.oid, "size": entry.size, **_lfs(entry, "oid")}


def _lfs(entry: Entry, key: str) -> dict[str, object]:
    if entry.lfs is None:
        return {}
    return {"lfs": {key: entry.lfs, "size": entry.size, "pointerSize": entry.pointer_size()}}
