// Python in a worker: Pyodide, the wheels, and the book's own package, all from this folder.
const folder = new URL("playground/", import.meta.url);

export const fetched = async (name) => {
  const answer = await fetch(new URL(name, folder), { cache: "no-cache" }); // a rebuilt book has other files of the same names
  if (!answer.ok) throw new Error(`${name} could not be loaded: ${answer.status} ${answer.statusText}`);
  return new Uint8Array(await answer.arrayBuffer());
};
export const text = async (name) => new TextDecoder().decode(await fetched(name));

// The interpreter, in which `mooncake_lab` can be imported, and the list of the folder's wheels and traces.
export async function start() {
  const manifest = JSON.parse(await text("manifest.json"));
  if (!manifest.wheels.length) throw new Error("this book was built without a network, so Python is not here");
  const { loadPyodide } = await import("./playground/pyodide.mjs");
  const pyodide = await loadPyodide({ indexURL: folder.href });
  for (const wheel of manifest.wheels) pyodide.unpackArchive(await fetched(wheel), "wheel");
  pyodide.unpackArchive(await fetched("mooncake_lab.zip"), "zip", { extractDir: "/package" });
  pyodide.runPython("import sys; sys.path.insert(0, '/package')");
  return { pyodide, manifest };
}

// the last line of a Python error is its message, behind the name of its class
export const reason = (error) => String(error.message ?? error).trim().split("\n").at(-1).replace(/^[\w.]*(Error|Exception): /, "");
