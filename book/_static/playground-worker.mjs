// Runs the simulator beside the page: Pyodide, the wheels, this package, and the traces that were asked for.
import { loadPyodide } from "./playground/pyodide.mjs";

const folder = new URL("playground/", import.meta.url);
const known = new Set();
let started = null;

const fetched = async (name) => {
  const answer = await fetch(new URL(name, folder), { cache: "no-cache" }); // a rebuilt book has other files of the same names
  if (!answer.ok) throw new Error(`${name} could not be loaded: ${answer.status} ${answer.statusText}`);
  return new Uint8Array(await answer.arrayBuffer());
};
const text = async (name) => new TextDecoder().decode(await fetched(name));

async function start() {
  const [pyodide, manifest] = await Promise.all([
    loadPyodide({ indexURL: folder.href }), text("manifest.json").then(JSON.parse),
  ]);
  for (const wheel of manifest.wheels) pyodide.unpackArchive(await fetched(wheel), "wheel");
  pyodide.unpackArchive(await fetched("mooncake_lab.zip"), "zip", { extractDir: "/package" });
  pyodide.runPython("import sys; sys.path.insert(0, '/package')");
  const { Simulator } = pyodide.pyimport("mooncake_lab.book.playground.simulator");
  return { pyodide, manifest, simulator: Simulator(await text("nodes.json")) };
}

async function run({ trace, file, blockSize, settings }) {
  if (!started) postMessage({ kind: "status", text: "Loading the simulator (about 15 MB, once)…" });
  const { pyodide, manifest, simulator } = await (started ??= start());
  const name = file ? `own ${file.name} ${file.size} ${file.lastModified} ${blockSize}` : trace;
  if (!known.has(name)) {
    const path = file ? "/your trace" : `/${manifest.traces[trace]}`;
    pyodide.FS.writeFile(path, file ? new Uint8Array(await file.arrayBuffer()) : await fetched(manifest.traces[trace]));
    try {
      simulator.read(name, path, file?.name, blockSize ?? undefined);
    } finally {
      pyodide.FS.unlink(path);
    }
    known.add(name);
  }
  postMessage({ kind: "status", text: "Simulating…" });
  const ended = (count) => postMessage({ kind: "status", text: `Simulating: ${count.toLocaleString("en")} requests have ended…` });
  return JSON.parse(simulator.run(name, JSON.stringify(settings), ended));
}

// the last line of a Python error is its message, behind the name of its class
const reason = (error) => String(error.message ?? error).trim().split("\n").at(-1).replace(/^[\w.]*(Error|Exception): /, "");

onmessage = async ({ data }) => {
  try {
    postMessage({ kind: "result", result: await run(data) });
  } catch (error) {
    if (!("type" in error)) { // no Python exception: what was loaded may be broken
      started = null;
      known.clear();
    }
    postMessage({ kind: "error", text: reason(error) });
  }
};
