// TypeScript SDK 1.x and 2.x: VERSION ADDRESS. The commands and outcomes are those of `commands.py`.

import { createInterface } from "node:readline";

const [version, address] = process.argv.slice(2);
const modules =
  version === "1"
    ? ["@modelcontextprotocol/sdk/client/index.js", "@modelcontextprotocol/sdk/client/streamableHttp.js"]
    : ["@modelcontextprotocol/client"];
const loaded = await Promise.all(modules.map((name) => import(name)));
const { Client, StreamableHTTPClientTransport } = Object.assign({}, ...loaded);
const PATIENT = { timeout: 1_800_000 };

const write = (fields) => process.stdout.write(JSON.stringify(fields) + "\n");
const client = new Client({ name: "player", version: "1.0.0" });
client.fallbackNotificationHandler = async (notification) => write({ notification: notification.method });
await client.connect(new StreamableHTTPClientTransport(new URL(address)));
await client.listTools({}, PATIENT);

async function run({ id, tool, arguments: args }) {
  const call = { name: tool, arguments: args };
  try {
    const result = await (version === "1" ? client.callTool(call, undefined, PATIENT) : client.callTool(call, PATIENT));
    const text = result.content.map((part) => part.text).join("");
    write(result.isError ? { id, error: text } : { id, text, structured: result.structuredContent ?? null });
  } catch (error) {
    write({ id, error: `${error.name}: ${error.message}` });
  }
}

write({ connected: true });
for await (const line of createInterface({ input: process.stdin })) void run(JSON.parse(line));
process.exit(0);
