// Lists the tools of an address and makes calls whose replies are given, with one of TypeScript's SDKs.
//
// Arguments: the package, `legacy` or `auto`, the address, a file with a JSON array of replies' members, and the
// time limit of a call in seconds. Prints the names of the tools and the exceptions that are no JSON-RPC errors of
// a task's server, as JSON.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [name, mode, address, file, seconds] = process.argv.slice(2);
const isFirst = name === "@modelcontextprotocol/sdk";
const require = createRequire(`${process.cwd()}/`);
const load = (path) => import(pathToFileURL(require.resolve(path)).href);
const { Client } = await load(isFirst ? `${name}/client/index.js` : name);
const { StreamableHTTPClientTransport } = await load(isFirst ? `${name}/client/streamableHttp.js` : name);

const client = new Client({ name: "calls", version: "1" }, { versionNegotiation: { mode } });
const options = { timeout: Number(seconds) * 1000 };
const raised = [];
let tools = [];
await client.connect(new StreamableHTTPClientTransport(new URL(address)));
try {
  tools = (await client.listTools(undefined, options)).tools.map((tool) => tool.name);
} catch (error) {
  raised.push(`tools/list: ${error}`.slice(0, 500));
}
for (const members of JSON.parse(readFileSync(file, "utf-8"))) {
  const call = { name: "root__reply", arguments: { members } };
  try {
    await (isFirst ? client.callTool(call, undefined, options) : client.callTool(call, options));
  } catch (error) {
    if (error?.data?.source !== "task") raised.push(`${members}: ${error}`.slice(0, 500));
  }
}
await client.close();
process.stdout.write(JSON.stringify({ tools, raised }));
